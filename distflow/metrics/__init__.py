"""What runs write about themselves: how metrics of several workers merge, and what follows from them."""
