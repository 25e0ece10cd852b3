mod formats;
mod mixed;
mod pages;
