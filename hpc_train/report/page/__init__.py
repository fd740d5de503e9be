"""Writes the report page of a run or a sweep: one HTML file without scripts, which reads nothing from the network.

``build.py`` puts the page together and writes it, from sections in ``verdict``, ``curves``, ``resources`` and others.
"""
