"""A model that answers others: HTTP, services, chat, batches. The command line alone imports this package."""
