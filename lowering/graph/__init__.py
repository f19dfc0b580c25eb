"""Reading a graph (nodes, views, dequantized tensors, quantizers, einsums) and changing it (emit)."""
