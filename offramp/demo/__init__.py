"""What `offramp demo` trains, plans, serves and shows; its texts are generated."""
