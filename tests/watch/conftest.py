"""Because of this file, tests in the subfolders can import the helpers of this folder."""
