"""Predicts the time, the memory and the cost of a training for each layout, without torch.

Three layers: ``work.py`` counts what a model computes, keeps and moves; ``machine.py`` states how fast a machine does
it; ``prediction.py`` runs one step with both.
"""
