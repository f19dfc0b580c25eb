"""The choice of a kernel and its configuration: the candidates, a model of their times, and tables of measured ones."""
