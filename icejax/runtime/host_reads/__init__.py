"""Ways of reading host memory inside a compiled program, and the choice of one that brings exact bits."""
