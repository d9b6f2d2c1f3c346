"""A Flower app whose server refines with DynaFed."""
