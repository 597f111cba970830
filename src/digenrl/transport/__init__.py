"""Data between ranks: messages and sockets, cells, weights, suspended tasks."""
