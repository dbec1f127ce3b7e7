"""What the processes say to one another: ids, events, orders, and their form on the wire. Pure."""
