"""Networks computed otherwise than they were written: cut, laid out anew, in half precision; what that changes."""
