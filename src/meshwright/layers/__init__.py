"""Kinds of layers, one file a kind: what each is made of as pieces, which give its time and its memory."""
