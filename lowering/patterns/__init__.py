"""What the substitution looks for in a graph: each module finds one family of products, and says what it did."""
