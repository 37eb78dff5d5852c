"""The parts of ``train_lm.py``: a byte-level GPT, its data, its checkpoints and its measurements."""
