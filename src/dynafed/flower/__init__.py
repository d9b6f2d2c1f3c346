"""DynaFed on Flower: a strategy that wraps any other, and every method of ours as a client app and a server app."""
