"""What a graph says (nodes, views, dequantized tensors, quantizers), and how a pass changes it (emit)."""
