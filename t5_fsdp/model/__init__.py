"""The T5: weights, loss and closed forms."""
