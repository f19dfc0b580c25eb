"""The patterns of the passes: each module finds one family of products in a graph and reports what it did."""
