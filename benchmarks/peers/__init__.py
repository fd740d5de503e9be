"""Our training step against those of other libraries and a bare PyTorch loop; see ``__main__``."""
