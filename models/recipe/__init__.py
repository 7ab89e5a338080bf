"""How the reference model is made: data, tokenizer, training, export, evaluation."""
