"""Which kernel and which configuration: the candidates, a model of their times, and tables of measured ones."""
