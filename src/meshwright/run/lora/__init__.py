"""Low-rank adapters (LoRA, Hu et al. 2106.09685) over a frozen base, in 16 bits or quantised (QLoRA, Dettmers et al.
2305.14314): modules, formats of the base, and PEFT's folders in and out."""
