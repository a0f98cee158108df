"""Running a Flower app with several clients on one machine: `flower-gpu launch`."""
