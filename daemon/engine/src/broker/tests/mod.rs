mod endings;
mod gate;
mod operations;
mod slots;
mod world;
