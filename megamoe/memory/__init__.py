"""Where bytes live: region tables, launch arguments, the window that ranks share."""
