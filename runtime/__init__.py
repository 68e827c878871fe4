"""Services that know nothing of SimCLR: errors, console, devices, hosts, signals, child processes, files."""
