"""One file per cache policy; `icejax.cache` names them."""
