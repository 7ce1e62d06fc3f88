"""What a decode step compiles to for a GPU or TPU that is not there, counted, and an estimate of what it takes."""
