"""From logits to tokens, and what is told of them."""
