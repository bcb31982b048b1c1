"""Settings, logs, clocks, random numbers, and the limits of the machine, as every process of Quire needs them."""
