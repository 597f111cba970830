"""What travels between ranks: messages and sockets, cells, weights, suspended tasks."""
