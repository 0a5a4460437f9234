"""What a cut or a mask lost is given back layer by layer and block by block, from the weights that stay."""
