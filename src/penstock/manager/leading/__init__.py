"""Who leads among several managers."""
