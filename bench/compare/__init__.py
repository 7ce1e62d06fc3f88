"""Cache policies beside one another: same model, same texts, same budget, same code around them."""
