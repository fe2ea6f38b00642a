"""What a model gets wrong: pure functions of labels and logits (numpy and scipy), and the files with their results."""
