"""Defines the style sheet of the page: light and dark, wide and narrow, on a screen and on paper."""

from __future__ import annotations

# The colors of the series differ in lightness too, for readers who do not see the hue. Text has a contrast of at least
# 4.5 and marks of at least 3 against the background in both modes (WCAG 2.2, 1.4.3 and 1.4.11).
_LIGHT = """
--page:#fff;--panel:#f5f6f8;--text:#1b1e24;--soft:#545b66;--line:#c9ced6;--lost:#7d838d;
--c0:#1f5fbf;--c1:#a8480b;--c2:#127a52;--c3:#7a3fb0;--c4:#8f1d3f;--c5:#5d6570;
--good:#0d6b45;--warn:#8a5a00;--bad:#b3202c;--best:#e3f3ea;--wait:#e4e7ec
"""
_DARK = """
--page:#14171c;--panel:#1d2229;--text:#e8eaee;--soft:#a9b0bb;--line:#3d444f;--lost:#8b929c;
--c0:#7fb2ff;--c1:#f0a36b;--c2:#5fd0a0;--c3:#c9a2f5;--c4:#f58aa6;--c5:#a9b0bb;
--good:#5fd0a0;--warn:#e8bd5b;--bad:#ff8a8a;--best:#1c3a2c;--wait:#2a303a
"""

STYLE = f"""
:root{{color-scheme:light dark;{_LIGHT}}}
@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}
@media print{{:root{{color-scheme:light;{_LIGHT}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--page);color:var(--text);font:16px/1.5 system-ui,sans-serif}}
header,main,footer{{max-width:64rem;margin:0 auto;padding:0 1rem}}
header{{padding-top:1.5rem}}
h1{{font-size:1.5rem;line-height:1.25;margin:0 0 .25rem;overflow-wrap:anywhere}}
h2{{font-size:1.2rem;margin:2.25rem 0 .5rem;padding-top:.75rem;border-top:1px solid var(--line)}}
h3{{font-size:1rem;margin:1.25rem 0 .25rem}}
p,ul,dl{{margin:.5rem 0}}
p,li,dd{{overflow-wrap:anywhere}}
ul{{padding-left:1.25rem}}
a{{color:var(--c0)}}
nav ul{{display:flex;flex-wrap:wrap;gap:.1rem 1rem;list-style:none;padding:0}}
nav a{{display:inline-block;padding:.25rem 0}}
.soft,figcaption,caption{{color:var(--soft);font-size:.875rem}}
.verdict{{font-size:1.2rem;font-weight:600;border-left:.4rem solid var(--c5);padding:.25rem .75rem}}
.good{{border-color:var(--good)}}.warn{{border-color:var(--warn)}}.bad{{border-color:var(--bad)}}
.todo{{background:var(--panel);border:1px solid var(--line);border-radius:.4rem;padding:.25rem 1rem}}
dl{{display:grid;grid-template-columns:repeat(auto-fill,minmax(9.5rem,1fr));gap:.5rem 1rem}}
dt{{color:var(--soft);font-size:.8125rem}}
dd{{margin:0;font-weight:600}}
pre{{background:var(--panel);border:1px solid var(--line);border-radius:.4rem;padding:.6rem .75rem;overflow:auto;
font:.8125rem/1.45 ui-monospace,monospace;max-height:30rem}}
code{{font-family:ui-monospace,monospace;font-size:.9em}}
pre code{{font-size:1em}}
.wide{{overflow-x:auto}}
table{{border-collapse:collapse;font-size:.875rem;min-width:min(100%,30rem)}}
caption{{text-align:left;padding:.25rem 0}}
th,td{{text-align:left;padding:.3rem .75rem .3rem 0;border-bottom:1px solid var(--line);vertical-align:top}}
th{{font-weight:600}}tbody th{{font-weight:400;white-space:nowrap}}
.number{{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}}
.best{{background:var(--best);font-weight:600}}.best th{{font-weight:600}}
figure{{margin:.75rem 0}}
.picture{{width:100%}}
svg{{display:block;width:100%;height:auto;overflow:visible}}
svg text{{fill:var(--text);font:12px system-ui,sans-serif}}
svg .soft{{fill:var(--soft);font-size:12px}}
.halo{{stroke:var(--page);stroke-width:4px;stroke-linejoin:round}}
.legend{{display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;list-style:none;padding:0;font-size:.875rem}}
.legend svg{{display:inline-block;width:1.5rem;height:.75rem;margin-right:.4rem;vertical-align:baseline}}
.nodes{{display:grid;grid-template-columns:repeat(auto-fill,minmax(10rem,1fr));gap:.6rem;list-style:none;padding:0}}
.nodes li{{border:1px solid var(--line);border-left:.35rem solid var(--good);border-radius:.3rem;padding:.35rem .6rem;
font-size:.875rem}}
.nodes .warn{{border-left-color:var(--warn)}}.nodes .bad{{border-left-color:var(--bad)}}
footer{{padding-top:2rem;padding-bottom:2rem}}
@media (max-width:40rem){{body{{font-size:15px}}h1{{font-size:1.25rem}}svg text,svg .soft{{font-size:20px}}
td{{white-space:nowrap}}td:last-child:not(.number){{white-space:normal;min-width:14rem}}}}
@media print{{nav{{display:none}}body{{font-size:10.5pt}}section{{break-inside:auto}}
h2,h3{{break-after:avoid}}figure,tr,.nodes li{{break-inside:avoid}}pre{{max-height:none;white-space:pre-wrap}}
.wide{{overflow:visible}}*{{-webkit-print-color-adjust:exact;print-color-adjust:exact}}}}
""".replace("\n", "")
