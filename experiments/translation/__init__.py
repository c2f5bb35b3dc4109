"""Descriptions of pictures, English to German: a small encoder-decoder, trained on Multi30k, that leaves early."""
