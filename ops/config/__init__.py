"""Where a fabric's settings come from: defaults < file < environment < arguments."""
