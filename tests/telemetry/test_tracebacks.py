"""Tracebacks on the console have the frames of the user's code only; nothing is hidden if there are none."""

from __future__ import annotations

import traceback
from pathlib import Path

import hpc_train
from hpc_train.telemetry.tracebacks import own_frames, own_place

PACKAGE = Path(hpc_train.__file__).parent

WHOLE = f"""Traceback (most recent call last):
  File "{PACKAGE}/train/worker.py", line 79, in train
    return _train(spec, stop, run, events)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/opt/env/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1778, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
  File "/home/me/hpc_train/net.py", line 27, in forward
    return self.out(self.blocks(x))
                    ^^^^^^^^^^^^^^
  File "/home/me/hpc_train/net.py", line 31, in forward
    return self.forward(x)
  [Previous line repeated 3 more times]
  File "/home/me/outputs/a/code/0a1b/hpc_train/models/wrapped.py", line 102, in forward
    outputs = self._module[0](inputs)
ValueError: first line
    second line
"""
OWN = """Traceback (most recent call last):
  [2 frames of hpc_train and libraries]
  File "/home/me/hpc_train/net.py", line 27, in forward
    return self.out(self.blocks(x))
                    ^^^^^^^^^^^^^^
  File "/home/me/hpc_train/net.py", line 31, in forward
    return self.forward(x)
  [Previous line repeated 3 more times]
  [1 frame of hpc_train and libraries]
ValueError: first line
    second line"""


def test_frames_of_libraries_are_counted() -> None:
    assert own_frames(WHOLE) == OWN
    assert own_place(WHOLE) == "net.py:31 in forward"


def test_what_has_no_own_frame_stays_whole() -> None:
    framework = "".join(WHOLE.splitlines(keepends=True)[:6]) + "ValueError: inside\n"
    assert own_frames(framework) == framework
    assert own_place(framework) is None
    assert own_frames("the training has diverged") == "the training has diverged"


def test_a_stack_of_a_process_begins_with_its_innermost_frame() -> None:
    stack = f"""rank 1, step after step 8
Thread 0x1 (most recent call first):
  File "/home/me/net.py", line 11 in forward
  File "/home/me/main.py", line 2 in <module>
  File "{PACKAGE}/models/wrapped.py", line 102 in forward
  File "<string>", line 1 in <module>"""
    assert own_place(stack) == "net.py:11 in forward"
    assert own_frames(stack).splitlines()[-2:] == [
        '  File "/home/me/main.py", line 2 in <module>',
        "  [2 frames of hpc_train and libraries]",
    ]


def test_a_traceback_of_this_python() -> None:
    try:
        Path("/nowhere").read_text()
    except OSError:
        shown = own_frames(traceback.format_exc())
    assert f'File "{__file__}"' in shown
    assert "pathlib" not in shown.partition("FileNotFoundError")[0]
