"""One profile under way: its steps, its schedule and who observes them."""
