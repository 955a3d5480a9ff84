"""Types that the processes of a cluster exchange about workers, devices, keys and addresses."""
