"""The command lines, one file each; `icejax/__main__.py` names them."""
