"""What every process of Quire needs: settings, logs, clocks, random numbers, and the machine that it runs on."""
