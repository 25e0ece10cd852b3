mod formats;
mod pages;
