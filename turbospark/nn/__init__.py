"""What families share: modules that hold weights, and the fusion units over them."""
