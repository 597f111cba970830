"""What travels between ranks: messages and sockets, cells, weights, tasks handed over."""
