"""Predicts the time, the memory and the cost of a training for each layout, without torch.

Three layers: ``work.py`` counts what a model computes, stores and moves; ``machine.py`` states how fast a machine does
this; ``prediction.py`` simulates one step with both.
"""
