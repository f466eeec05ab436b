"""How the model is spread over devices."""
