"""seqdiff: diffusion over sequences, many complete futures in parallel, scored jointly."""

__version__ = "0.1.0"
