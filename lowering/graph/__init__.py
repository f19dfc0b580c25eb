"""What a graph says: views, dequantized tensors, quantizers, and the exchange of a node."""
