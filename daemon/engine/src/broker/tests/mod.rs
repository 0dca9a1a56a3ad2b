mod gate;
mod slots;
