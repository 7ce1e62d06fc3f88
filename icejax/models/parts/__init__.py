"""Parts of a decoder layer: projections and norms, experts, latent attention."""
