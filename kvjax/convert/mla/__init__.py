"""Conversion of MHA, GQA and MQA checkpoints to multi-head latent attention."""
