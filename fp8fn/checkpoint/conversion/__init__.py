"""Conversion of a checkpoint to FP8: plans the files, writes them whole, checks each weight, and resumes."""
